/* Constants that compilers must not know: gcc makes one vmaxps of a comparison with a variable, but
 * a compare and a blend of one with a constant. */
#include "common/cpu/math.h"

const float exp_zero_float = -88;
const float exp2_zero_float = -126;
const float logistic_zero_float = -110;
const float logistic_one_float = 44;
const float gelu_zero_float = -15;
