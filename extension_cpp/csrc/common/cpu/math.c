/* Constants whose values the compiler must not see. gcc compiles `x < c ? c : x` to a single vmaxps
 * if c is a variable, but to a compare and a blend if c is a constant. */
#include "common/cpu/math.h"

const float exp_zero_float = -88;
const float exp2_zero_float = -126;
const float logistic_zero_float = -110;
const float logistic_one_float = 44;
const float gelu_zero_float = -15;
