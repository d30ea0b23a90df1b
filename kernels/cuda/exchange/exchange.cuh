#pragma once
#include "kernels/cuda/exchange/exchange_args.h"

// The two halves of an exchange as device code, to be fused into the kernels that produce and consume. Memory order: a
// sender's stores come before its number (release, system scope), a receiver's loads after it (acquire).

namespace dovetail::kernels::cuda {

__device__ __forceinline__ uint64_t GlobalNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Both words of a line in one load: {arrived, given_up}.
__device__ __forceinline__ ulonglong2 LoadArrived(const ExchangeWords* words) {
  ulonglong2 v;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(words) : "memory");
  return v;
}
__device__ __forceinline__ void StoreSystem(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ __noinline__ void FailExchange(const ExchangeEnd& end, uint64_t step, ExchangeReason reason,
                                                 uint32_t op) {
  auto* failure = reinterpret_cast<unsigned long long*>(&end.own->failure);
  atomicCAS(failure, 0ull, static_cast<unsigned long long>(EncodeFailure(reason, op)));
  StoreSystem(&end.peer->given_up, step + kExchangeOps - 1);
}

// By one thread; the others of its block pass a __syncthreads() after it before they read what came. False: it did not
// come, the step has failed.
__device__ __forceinline__ bool ExchangeAwait(const ExchangeEnd& end, uint32_t op) {
  constexpr int kLooksPerClock = 16;
  const volatile ExchangeWords* own = end.own;
  const uint64_t step = own->step, want = step + op + 1, since = GlobalNanoseconds();
  uint64_t begin = 0;
  for (int looks = 0;; ++looks) {
    const ulonglong2 now = LoadArrived(end.own);
    if (now.x >= want) break;
    if (looks % kLooksPerClock != 0) continue;
    if (own->failure != 0) return false;
    if (now.y >= want) {
      FailExchange(end, step, ExchangeReason::kGivenUp, op);
      return false;
    }
    const uint64_t clock = GlobalNanoseconds();
    if (begin == 0) begin = clock;
    if (clock - begin > end.deadline_ns) {
      FailExchange(end, step, ExchangeReason::kDeadline, op);
      return false;
    }
  }
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  // All blocks of a grid wait; what one of them says is what all of them did.
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    const uint64_t now = GlobalNanoseconds();
    end.own->waited_ns += now - since;
    end.own->begun_ns = now;
  }
  return true;
}

// The turn of a step as its words say; step and turn are the same throughout the step.
struct TurnOf {
  unsigned long long* holder = nullptr;  // null: the step takes no turns
  unsigned long long mine = 0;
};
__device__ __forceinline__ TurnOf LoadTurn(const ExchangeWords* own) {
  const volatile ExchangeWords* words = own;
  ExchangeTurn* const turn = words->turn;
  if (turn == nullptr) return {};
  return {reinterpret_cast<unsigned long long*>(&turn->holder), words->step + 1};
}

// By one thread, when what the step waited for is there. Not for a step that has failed.
__device__ __forceinline__ void TakeTurn(ExchangeWords* own) {
  constexpr int kLooksPerClock = 16;
  const TurnOf turn = LoadTurn(own);
  if (turn.holder == nullptr) return;
  const volatile ExchangeWords* words = own;
  const volatile ExchangeTurn* shared = words->turn;
  const uint64_t since = GlobalNanoseconds();
  uint64_t changed = since;  // when the holder was first seen
  unsigned long long last = 0;
  for (int looks = 0;; ++looks) {
    const unsigned long long seen = atomicCAS(turn.holder, 0ull, turn.mine);
    if (seen == 0 || seen == turn.mine) break;
    if (seen == last && looks % kLooksPerClock != 0) continue;
    const uint64_t clock = GlobalNanoseconds();
    if (seen != last) {
      last = seen;
      changed = clock;
    } else if (clock - changed > shared->most_ns && atomicCAS(turn.holder, seen, turn.mine) == seen) {
      break;
    }
  }
  const uint64_t now = GlobalNanoseconds();
  own->turn_ns += now - since;
  own->begun_ns = now;  // the wait does not count as work
}

__device__ __forceinline__ void GiveTurn(const TurnOf& turn) {
  if (turn.holder != nullptr) atomicCAS(turn.holder, turn.mine, 0ull);
}

// By one thread, after everything of the message was stored.
__device__ __forceinline__ void ExchangeSignal(const ExchangeEnd& end, uint32_t op) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  const volatile ExchangeWords* own = end.own;
  if (own->failure != 0) return;
  if (const uint64_t begun = own->begun_ns; begun != 0) {
    end.own->busy_ns += GlobalNanoseconds() - begun;
    end.own->begun_ns = 0;
    end.peer->peer_busy_ns = end.own->busy_ns;
  }
  StoreSystem(&end.peer->arrived, own->step + op + 1);
}

// By one thread of each of `blocks` blocks, after all of its threads have stored: whether this is the last block.
__device__ __forceinline__ bool ExchangeIsLast(const ExchangeEnd& end, uint32_t blocks) {
  if (blocks == 1) return true;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  if (atomicAdd(&end.own->blocks_done, 1u) != blocks - 1) return false;
  end.own->blocks_done = 0;
  return true;
}

// By all threads of all `blocks` blocks, at their ends: the last one signals.
__device__ __forceinline__ void ExchangeSignalWhenLast(const ExchangeEnd& end, uint32_t op, uint32_t blocks) {
  __syncthreads();
  if (threadIdx.x == 0 && ExchangeIsLast(end, blocks)) ExchangeSignal(end, op);
}

// The same to all peers. Blocks of at least kMostExchangePeers threads.
__device__ __forceinline__ void ExchangeSignalAllWhenLast(const ExchangeFan& fan, uint32_t op, uint32_t blocks) {
  __syncthreads();
  const bool last = threadIdx.x == 0 && ExchangeIsLast(fan.peers[0].end, blocks);
  if (last) asm volatile("fence.acq_rel.gpu;" ::: "memory");  // other threads signal what other blocks stored
  if (__syncthreads_or(last) && threadIdx.x < fan.count) ExchangeSignal(fan.peers[threadIdx.x].end, op);
}

}  // namespace dovetail::kernels::cuda
