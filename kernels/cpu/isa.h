#pragma once
#include <optional>
#include <string_view>

#include "kernels/device.h"

namespace dovetail::kernels {

// The strongest level this CPU and its operating system run, or nullopt below x86-64-v3 (AVX2, FMA, F16C, BMI2). Where
// there is AMX, the first call asks the operating system that this process may use it.
// Threads: thread-safe.
std::optional<Isa> DetectIsa();

const char* Name(Isa isa);  // "avx2", "avx512", "amx"
// The level with this name, or nullopt.
std::optional<Isa> IsaCalled(std::string_view name);

// Cores this process may run on (its affinity mask), at least 1.
// Threads: thread-safe.
int UsableCores();

}  // namespace dovetail::kernels
