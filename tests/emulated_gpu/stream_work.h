#pragma once
#include <cuda_runtime_api.h>

#include <functional>

namespace emu {

// Work of a stream: done at once, on the caller's thread, or added to the graph that the stream records. Any thread,
// one at a time per stream. What it points to must stay until the work is done.
void Do(cudaStream_t stream, std::function<void()> work);

// The error of the last launch that was refused; it is told once. Any thread.
cudaError_t TakeError();

}  // namespace emu
