#include "kernels/cpu/isa.h"

#include <sched.h>

namespace dovetail::kernels {

std::optional<Isa> DetectIsa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  if (!avx2) return std::nullopt;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512bf16");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
}

const char* Name(Isa isa) { return isa == Isa::kAvx512 ? "avx512" : "avx2"; }

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  const int cores = CPU_COUNT(&set);
  return cores < 1 ? 1 : cores;
}

}  // namespace dovetail::kernels
