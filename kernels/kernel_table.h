#pragma once
#include "kernels/cpu/gemm_kernels.h"
#include "kernels/cpu/ops_table.h"
#include "kernels/device.h"

namespace dovetail::kernels {

// The inner loops of every op, chosen once per device and ISA.
// Threads: immutable.
struct KernelTable {
  Isa isa = Isa::kAvx2;
  GemmKernels gemm;
  const OpsTable* ops = nullptr;
};

// The CPU must have `isa` (DetectIsa).
KernelTable SelectKernels(Isa isa);

}  // namespace dovetail::kernels
