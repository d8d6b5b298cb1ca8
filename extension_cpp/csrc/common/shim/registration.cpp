// Registers operators. Their schemas are first compared with the C++ functions behind them (op.h).
#include <algorithm>
#include <map>
#include <vector>

#include "common/shim/op.h"

namespace extension_cpp {

// The suffixes of the overloads' names. registration/calls.py has the same suffixes.
constexpr char NO_GRAD[] = "_no_grad", ALL_RESULTS[] = "_all_results";

// The errors of operators that DEF rejected because schema and function differ, one per line.
static std::string &schema_errors() {
  static std::string errors;
  return errors;
}

// The boxed functions given to DEF, by operator name, or nullptr for an operator whose function
// does not fit its schema.
static std::map<std::string, BoxedKernel> &kernels() {
  static std::map<std::string, BoxedKernel> kernels;
  return kernels;
}

// Splits a list such as "Tensor x, int[2] d=[1, 2]" at its commas, except those inside brackets.
static std::vector<std::string> split(const std::string &list) {
  std::vector<std::string> items;
  int depth = 0;
  bool in_item = false;
  for (const char c : list) {
    depth += (c == '(' || c == '[') - (c == ')' || c == ']');
    if (c == ',' && depth == 0) {
      in_item = false;
    } else if (in_item || c != ' ') {
      if (!in_item) items.emplace_back();
      in_item = true;
      items.back() += c;
    }
  }
  return items;
}

// Returns the type of an item such as "Tensor(a!)? x=None", spelled as TypeOf does: "Tensor?".
// SymInt[1] becomes int[].
static std::string type_of(const std::string &item) {
  std::string type;
  // the bracket that opened the current (...) or [...], whose characters are skipped
  char inside = '\0';
  for (const char c : item) {
    if (inside == '\0' && c == ' ') break;
    if (c == ')' || c == ']') inside = '\0';
    if (inside == '\0' && c != ')' && c != '(') type += c;
    if (c == '(' || c == '[') inside = c;
  }
  return type.compare(0, 6, "SymInt") == 0 ? type.substr(3).replace(0, 3, "int") : type;
}

// Returns the name in an item such as "float s=1.0".
static std::string name_of(const std::string &item) {
  const std::string bare = item.substr(0, item.find('='));
  return bare.substr(bare.rfind(' ') + 1);
}

// Returns "" if schema and C++ function have the same types, and a message if not. `what` is
// "argument" or "result".
static std::string difference(const std::string &what, const std::vector<std::string> &items,
                              Types types) {
  size_t count = 0;
  while (types[count] != nullptr) ++count;
  if (count != items.size()) {
    return "expected " + std::to_string(items.size()) + " " + what +
           (items.size() == 1 ? "" : "s") + ", as in its schema, but got a C++ function with " +
           std::to_string(count);
  }
  for (size_t i = 0; i < count; ++i) {
    const Type type = types[i]();
    const std::string expected = type_of(items[i]);
    if (type.schema == expected) continue;
    return "expected " + what + " " + (what == "result" ? std::to_string(i) : name_of(items[i])) +
           " to be " + expected + ", as in its schema, but got a C++ function with " + type.cpp +
           (type.cpp == type.schema ? "" : ", which is " + type.schema);
  }
  return "";
}

static std::string difference(const std::string &schema, const Function &function) {
  const size_t arrow = schema.rfind(" -> "), begin = schema.find('(') + 1;
  std::vector<std::string> arguments =
      split(schema.substr(begin, schema.rfind(')', arrow) - begin));
  arguments.erase(std::remove(arguments.begin(), arguments.end(), "*"), arguments.end());
  const std::string different = difference("argument", arguments, function.arguments);
  if (!different.empty()) return different;
  std::string results = schema.substr(arrow + 4);
  if (results.front() == '(') results = results.substr(1, results.size() - 2);
  return difference("result", split(results), function.results);
}

static void keep_error(const std::string &op, const std::string &error) {
  schema_errors() +=
      (schema_errors().empty() ? "" : "\n") + ("extension_cpp::" + op) + ": " + error;
}

void def(StableLibrary &m, const std::string &schema, const Function &function) {
  const std::string name = schema.substr(0, schema.find('(')), error = difference(schema, function);
  kernels()[name] = error.empty() ? function.kernel : nullptr;
  if (!error.empty()) return keep_error(name, error);
  m.def(schema.c_str());
}

static std::string with_suffix(std::string schema, const char *suffix) {
  return schema.insert(schema.find('('), suffix);
}

// The schema of a no-grad overload that returns `results`.
static std::string no_grad_schema(std::string schema, const std::string &results) {
  schema.replace(schema.rfind("-> ") + 3, std::string::npos, results);
  return with_suffix(schema, NO_GRAD);
}

void def_with_no_grad(StableLibrary &m, const char *schema, const Function &function) {
  def(m, schema, function);
  def(m, with_suffix(schema, NO_GRAD), function);
}

void def_with_fewer_results(StableLibrary &m, const char *schema, const Function &function,
                            const char *no_grad_results, const Function &no_grad_function) {
  def(m, schema, function);
  def(m, with_suffix(schema, ALL_RESULTS), function);
  def(m, no_grad_schema(schema, no_grad_results), no_grad_function);
}

void def_in_python(StableLibrary &m, const char *schema, const char *no_grad_results) {
  m.def(schema);
  if (no_grad_results == nullptr) {
    m.def(with_suffix(schema, NO_GRAD).c_str());
  } else {
    m.def(with_suffix(schema, ALL_RESULTS).c_str());
    m.def(no_grad_schema(schema, no_grad_results).c_str());
  }
}

void impl(StableLibrary &m, const std::string &name, BoxedKernel kernel) {
  const auto defined = kernels().find(name);
  if (defined == kernels().end())
    return keep_error(name, "expected a schema in DEF before its kernel, but got none");
  if (defined->second == nullptr) return;
  if (defined->second != kernel)
    return keep_error(name,
                      "expected a kernel of the function that DEF compared its schema with, but "
                      "got another function's");
  m.impl(name.c_str(), kernel);
}

void impl_with_no_grad(StableLibrary &m, const std::string &name, BoxedKernel kernel,
                       BoxedKernel no_grad_kernel) {
  impl(m, name, kernel);
  impl(m, name + NO_GRAD, no_grad_kernel ? no_grad_kernel : kernel);
  if (no_grad_kernel) impl(m, name + ALL_RESULTS, kernel);
}

}  // namespace extension_cpp

// Returns the collected errors, or "" if there are none. The package's __init__.py raises them.
extern "C" __attribute__((visibility("default"))) const char *extension_cpp_schema_errors() {
  return extension_cpp::schema_errors().c_str();
}
