/* Usage: tests <name> [step]. Runs one test, at the instruction set that EXTENSION_CPP_CPU_LEVEL
 * names, and exits with 0 if it passes. Lines that begin with "bits" are hashes of results. They
 * must be equal for all instruction sets with FMA. */
#include "check.h"
#include "common/cpu/level.h"

/* The function of common/cpu/level.c, which tests/test_c.py renames from cpu_should_stream. The
 * tests define cpu_should_stream below, so that small data can be streamed, too. */
int real_cpu_should_stream(int64_t bytes);

int should_stream = 0;
int64_t streaming_bytes = -1;

int cpu_should_stream(int64_t bytes) {
  streaming_bytes = bytes;
  return should_stream;
}

static void test_level(uint32_t step) {
  (void)step;
  CHECK(!real_cpu_should_stream(0) && !real_cpu_should_stream(64 << 10),
        "64 KiB would be written past the caches");
  CHECK(real_cpu_should_stream(INT64_MAX), "no size at all would be written past the caches");
  printf("%s\n", cpu_level_name(cpu_level()));
}

/* Prints whether the library would stream the results of a kernel that reads and writes this many
 * KiB, and of a kernel that reads and writes one byte more. */
static void test_streams(uint32_t kib) {
  const int64_t bytes = (int64_t)kib << 10;
  printf("%d %d\n", real_cpu_should_stream(bytes), real_cpu_should_stream(bytes + 1));
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(uint32_t step);
  } tests[] = {
      {"level", test_level},
      {"streams", test_streams},
      {"exp", test_exp},
      {"softmax_math", test_softmax_math},
      {"mish", test_mish},
      {"mish_halves", test_mish_halves},
      {"loads", test_loads},
      {"stores", test_stores},
      {"flat_sizes", test_flat_sizes},
      {"flat_ranges", test_flat_ranges},
      {"scale_bias_relu_sizes", test_scale_bias_relu_sizes},
      {"scale_bias_relu_ranges", test_scale_bias_relu_ranges},
      {"reduce_sum_sizes", test_reduce_sum_sizes},
      {"reduce_sum_ranges", test_reduce_sum_ranges},
      {"philox", test_philox},
      {"dropout_sizes", test_dropout_sizes},
      {"dropout_ranges", test_dropout_ranges},
      {"norm_sizes", test_norm_sizes},
      {"norm_hostile", test_norm_hostile},
      {"norm_ranges", test_norm_ranges},
      {"norm_fused", test_norm_fused},
      {"softmax_sizes", test_softmax_sizes},
      {"softmax_hostile", test_softmax_hostile},
      {"softmax_ranges", test_softmax_ranges},
      {"loss_sizes", test_loss_sizes},
      {"loss_hostile", test_loss_hostile},
      {"loss_ranges", test_loss_ranges},
      {"loss_reduce", test_loss_reduce},
      {"rotary", test_rotary},
      {"bias_gelu", test_bias_gelu},
      {"scan_sizes", test_scan_sizes},
      {"scan_parts", test_scan_parts},
  };
  const uint32_t step = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 61;
  for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) {
    if (argc < 2 || strcmp(argv[1], tests[i].name) != 0) continue;
    tests[i].run(step);
    return 0;
  }
  printf("usage: tests <name> [step]; the names:");
  for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) printf(" %s", tests[i].name);
  printf("\n");
  return 2;
}
