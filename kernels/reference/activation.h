#pragma once

namespace dovetail::kernels::reference {

// activation.h on one element, in double precision.
// Threads: pure.
double SiluMul(double gate, double up);
double GeluMul(double gate, double up);
double ReluMul(double gate, double up);
double ClampedSwiglu(double gate, double up);

}  // namespace dovetail::kernels::reference
