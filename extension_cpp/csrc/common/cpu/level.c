/* Picks the instruction set, and the number of bytes above which results are written with
 * non-temporal stores. Both are chosen once, when the library is loaded. */
#define _GNU_SOURCE
#include "common/cpu/level.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__) && !defined(CPU_BASELINE_ONLY)
#include <cpuid.h>
#endif

static cpu_level_t chosen_level = CPU_BASELINE;
static int64_t last_level_cache = 32 << 20;

const char *cpu_level_name(cpu_level_t level) {
  static const char *const names[] = {"baseline", "v3", "v4"};
  return names[level];
}

static cpu_level_t detect(void) {
#if defined(__x86_64__) && !defined(CPU_BASELINE_ONLY)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx = 0, edx;
  /* Reads cpuid (leaf 1, ecx bit 29), because clang 14 does not know the name "f16c". */
  const int f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  if (!(f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")))
    return CPU_BASELINE;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return CPU_V4;
  }
  return CPU_V3;
#else
  return CPU_BASELINE;
#endif
}

/* Returns the size in bytes of the last-level cache that CPU 0 shares with its group of cores, or 0
 * if unknown. sysconf is no substitute, because on AMD processors it adds up the caches of all
 * groups: 256 MiB, for example, where each group has 32 MiB. */
static int64_t shared_cache(void) {
  char text[32] = "";
  FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
  if (file == NULL) return 0;
  if (fgets(text, sizeof text, file) == NULL) text[0] = 0;
  fclose(file);
  int64_t kib = 0; /* the file holds a number of KiB and the letter K */
  for (const char *c = text; *c >= '0' && *c <= '9'; ++c) kib = 10 * kib + (*c - '0');
  return kib << 10;
}

/* Warns of a bad value and does not fail, because programs other than Python load the library,
 * too. */
static void ignore(const char *variable, const char *expected, const char *got) {
  fprintf(stderr, "extension_cpp: expected %s to be %s, but got '%s', which is ignored\n", variable,
          expected, got);
}

__attribute__((constructor)) static void choose(void) {
  chosen_level = detect();
  const char *asked = getenv("EXTENSION_CPP_CPU_LEVEL");
  int is_level = asked == NULL || *asked == 0;
  for (cpu_level_t level = CPU_BASELINE; !is_level && level <= CPU_V4; ++level) {
    is_level = strcmp(asked, cpu_level_name(level)) == 0;
    if (is_level && level < chosen_level) chosen_level = level;
  }
  if (!is_level) ignore("EXTENSION_CPP_CPU_LEVEL", "baseline, v3 or v4", asked);
  int64_t size = shared_cache();
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (size == 0) size = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  if (size > 0) last_level_cache = size;
  const char *bytes = getenv("EXTENSION_CPP_CPU_CACHE");
  if (bytes == NULL || *bytes == 0) return;
  char *end;
  size = strtoll(bytes, &end, 10);
  if (*end == 0) {
    last_level_cache = size;
  } else {
    ignore("EXTENSION_CPP_CPU_CACHE", "a number of bytes", bytes);
  }
}

cpu_level_t cpu_level(void) { return chosen_level; }

int cpu_should_stream(int64_t bytes) { return bytes > last_level_cache; }
