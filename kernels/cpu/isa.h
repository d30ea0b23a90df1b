#pragma once
#include <optional>

#include "kernels/device.h"

namespace dovetail::kernels {

// The strongest level this CPU and its operating system run, or nullopt below x86-64-v3 (AVX2, FMA, F16C, BMI2). Where
// there is AMX, the first call asks the operating system that this process may use it.
// Threads: thread-safe.
std::optional<Isa> DetectIsa();

const char* Name(Isa isa);  // "avx2", "avx512", "amx"

// Cores this process may run on (its affinity mask), at least 1.
// Threads: thread-safe.
int UsableCores();

}  // namespace dovetail::kernels
