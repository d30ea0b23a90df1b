#pragma once
#include <variant>
#include <vector>

namespace dovetail::exchange {

class GpuExchange;
class SharedGpu;

// The seam is the place in every attention op where q, k and v leave a compute worker and o comes back. A `Seam` says
// how they cross in one step of a micro-batch, and to which peers. It is a value: the compute worker chooses it once a
// step, and both workers hand it to what computes on their device.
//
// This header is the contract of all ways across. A way consists of an alternative of `Seam`, of a `compute::Crossing`
// (compute_worker/crossing.h: the frames of the step), and of what the backends of the two workers do with it. A new
// way adds these and one line to `compute::WaysOf`; it changes no other way.
//
// Terms: the *compute node* and the *attention node* are the event loops of the two workers; a *part* is one attention
// worker's share of a step; a *payload* is q, or k and v, or the answer (o, or partials) of an op and part.
//
// Obligations. `tests/seam` checks each of them by its number, over every way: a monitor watches the ports and the
// backends while requests are served, and names the obligation that a call breaks.
//
//  1. One choice. The compute node chooses the seam of a step once: after its plan is known, and before any of its
//     frames is sent. All parts cross in the same way. The choice holds until the step has ended.
//  2. The begin comes first. The compute node sends each part its begin before anything else of the step. The type of
//     that frame says whether payloads travel in frames (kStepBegin) or not (kStepBeginOnDevice).
//  3. The backends are told. Each node gives the seam to its backend's PrepareStep, before it asks the backend for
//     anything else of the step. A backend is given no way that it was not made for: a CPU's only ThroughHosts.
//  4. Ops in order. Ops come in ascending order. Of each, the compute node sends q, then k and v; the attention node
//     gives the backend q (TakeQuery), then k and v (AppendAndFinish). A part that is not asked gets no q, and one
//     without rows in an op gets nothing of it.
//  5. Payloads are lent. The sender leaves a payload as it is, where it is, until it was answered.
//     ThroughHosts: bytes in host memory, which are there when the frame is sent. If the device has not computed them
//     when the frame is due, it is sent late; what a step draws waits behind its last frame.
//     OnOneGpu: device memory. What was enqueued before writes its bytes.
//     BetweenGpus: a slot of the receiver's GPU; there once its number is. The answer gives the slot back.
//  6. One answer. Each part that is asked gives one answer to an op. The compute node has the answers of all parts
//     before it runs the piece that reads o. Where no frame brings them it makes them itself, at once: they say where o
//     will be, and what reads o waits for it on the device.
//  7. No frame too many. BetweenGpus sends no kQuery, kKeyValue or kPartial, and its backends are not asked to pack.
//  8. The work is launched. What a step enqueues runs when its launch was asked for, at the latest.
//     ThroughHosts: there is nothing to launch.
//     OnOneGpu: both backends add to one list of launches in the order of the frames, and the compute backend launches
//     it when it draws.
//     BetweenGpus: each side launches its own, the attention node after the last op, the compute backend when it draws.
//  9. Failures end waits. When a step fails on either side, its node says so to the way (EndFailed) with the number of
//     the step, before the next step of the micro-batch begins. After that nothing waits for the other side any longer.
//
// A step of one op through the hosts, in short: begin; PrepareStep on both sides; q, TakeQuery; k and v,
// AppendAndFinish; the answer; the piece that reads o; the draws.
//
// Threads: each side belongs to one event loop. Nothing here waits for the other side on a host.
// Ownership: a Seam owns nothing. What it names outlives the step.
struct ThroughHosts {};  // payloads are host memory, in frames: any device, placement and host

// Payloads of frames are addresses in the memory of the GPU that both workers have, in one process: one attention
// worker holds every sequence of the step whole. The host asks once a step, for the tokens
// (exchange/cuda/shared_gpu.h).
struct OnOneGpu {
  SharedGpu* gpu = nullptr;
};

// Kernels store payloads into the other GPU's memory and wait for numbers there (exchange/cuda/gpu_exchange.h). Those
// of a step with prompts that the compute worker attends are copied there by its copy engine.
struct BetweenGpus {
  // Of a compute worker: by part of the step, at least one. Of an attention worker: the one with the compute worker.
  std::vector<GpuExchange*> peers;
};

using Seam = std::variant<ThroughHosts, OnOneGpu, BetweenGpus>;

}  // namespace dovetail::exchange
