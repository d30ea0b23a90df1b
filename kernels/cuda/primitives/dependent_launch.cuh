#pragma once
#include <cuda_runtime.h>

// Kernels that begin before their predecessor in the stream has ended (programmatic dependent launch), so that what
// they do first overlaps its end. Until WaitForPredecessor they may read only what the predecessor does not write, and
// nothing that the kernel before it writes if it too was launched this way; they write nothing that those read. A
// kernel that was launched this way calls it before it ends, in every thread block.
//
// A kernel that lets a successor begin before it has waited itself lets it begin before older kernels have ended:
// products, norms and activations, which read only weights before they wait, may follow; KvAppend reads tables, and
// attention older K and V, so the products before them let them begin only after they have waited. KvAppend does not
// wait either before it lets attention begin: what is before it has.

namespace dovetail::kernels::cuda {

// All that the predecessor wrote can be seen. At once if the kernel was launched as usual.
__device__ __forceinline__ void WaitForPredecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The successor may begin once all thread blocks have called this or ended.
__device__ __forceinline__ void LetSuccessorBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// GPUs for which there is code with the instructions above: newer ones run that of the oldest.
inline bool DeviceLaunchesDependents() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

// cudaError_t as int. As usual where the device cannot do it.
template <typename Args>
int LaunchDependent(void (*kernel)(Args), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                    const Args& args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = DeviceLaunchesDependents() ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, Args(args)));
}

}  // namespace dovetail::kernels::cuda
