#pragma once
#include <span>

#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/state/state_layout.h"

namespace dovetail::kernels::cuda {

// Linear states on a GPU: the operator of kernels/linear_state.h over blocks that lie in a GPU's memory, with the
// convolution, the norms and the rates that come before it, and the skip behind it: payloads in, payloads out, as
// proto::LinearSpec describes them (state_args.h).
//
// Both forms append the items' tokens to their blocks and write o. S is the value at the last multiple of 64 positions;
// it is read once, and written once, when the last token of its block arrives. So appending is as idempotent as on the
// CPU. Sums are in f32; keys, values (or u) and vector decays of a block's tokens are kept in 16 bits.
//
// kInvalidArgument, before anything runs, for shapes, pointers and sizes outside what is said here; kInternal if the
// device is lost. Enqueue and return; may be captured.
// Oracle: kernels/reference/linear_state.h; budgets in tests/kernels_cuda/cuda_state_test.cc.
// Threads: thread-safe on different streams.

// The shape, layout and flags of a launch, for pieces of piece_bytes. kUnimplemented: a rank-one update.
absl::StatusOr<StateLaunch> StateLaunchFor(const LinearStateShape& shape, size_t piece_bytes, WireType wire);

// Token after token, each item's in turn: for few tokens (decode, verification); exact in f32, except for what is kept.
// All blocks from the one before the first token's to the last token's must be kept (none before block 0).
absl::Status AppendStates(CudaStream& stream, const StateLaunch& args);

// The same a block at a time, on tensor cores: for many tokens. Products take bf16; S is summed in f32. Of the blocks,
// those are needed that kernels/linear_state.h says; others are written where they are kept. args.chunk_end: the chunks
// of the item that has most. They are taken as many at a time as `workspace` (256-byte aligned) has room for:
// kResourceExhausted if that is none.
absl::Status AppendStatesInChunks(CudaStream& stream, const StateLaunch& args, std::span<std::byte> workspace);
// Whether it runs on such a device: keys of up to 128 dimensions, and enough shared memory.
bool StatesRunInChunks(const CudaDevice& device, const StateLaunch& args);
// For all chunks at a time, or as many as `most` bytes have room for.
size_t StateWorkspaceBytes(const StateLaunch& args, size_t most);

}  // namespace dovetail::kernels::cuda
