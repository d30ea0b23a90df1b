#include "kernels/cpu/isa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dovetail::kernels {

namespace {

// Linux lets a process use the state of tiles, 8 KiB a thread, once it has asked. A filter of system calls may refuse.
bool MayUseTiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::optional<Isa> Detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  if (!avx2) return std::nullopt;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512bf16");
  if (!avx512) return Isa::kAvx2;
  const bool amx = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                   __builtin_cpu_supports("amx-bf16") && MayUseTiles();
  return amx ? Isa::kAmx : Isa::kAvx512;
}

}  // namespace

std::optional<Isa> DetectIsa() {
  static const std::optional<Isa> isa = Detect();
  return isa;
}

const char* Name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
  }
  return "";
}

std::optional<Isa> IsaCalled(std::string_view name) {
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAmx})
    if (name == Name(isa)) return isa;
  return std::nullopt;
}

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  const int cores = CPU_COUNT(&set);
  return cores < 1 ? 1 : cores;
}

}  // namespace dovetail::kernels
