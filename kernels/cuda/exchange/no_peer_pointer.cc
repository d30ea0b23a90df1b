#include "kernels/cuda/exchange/exchange_launches.h"

namespace dovetail::kernels::cuda {

int UcxPeerPointer(int, void*, unsigned, void** pointer) {
  *pointer = nullptr;
  return -1;
}

}  // namespace dovetail::kernels::cuda
