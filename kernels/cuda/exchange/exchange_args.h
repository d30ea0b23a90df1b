#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// How two GPUs hand each other the tensors of a layer with no host between: each stores into the other's memory, then
// stores a number into a word there; the other waits for that number in a kernel. Numbers only grow: message `op` of
// step s is s * kExchangeOps + op + 1, so that nothing of an earlier step, finished or given up, is taken for one of
// this step.
// Threads: plain values and pure functions.

inline constexpr uint64_t kExchangeOps = 4096;  // attention ops a model may have, less one

// Steps of several micro-batches that share a GPU may take turns in its dense layers: a step takes the turn when what
// it waits for is there, and gives it up when what it sends is made. In device memory, one a compute worker. Only speed
// depends on it: a step that has waited for the same holder for `most_ns` takes the turn over, and giving up a turn
// that a step does not hold does nothing, so a holder that never returns delays a step once at most.
struct ExchangeTurn {
  uint64_t holder = 0;  // 0: none; else ExchangeWords::step + 1
  uint64_t most_ns = 2'000'000;
};

// What one side of one micro-batch's exchange keeps in its own device memory; the pointers below are into two of them.
// 128 bytes, so that words of different micro-batches lie in different lines.
struct ExchangeWords {
  uint64_t arrived = 0;       // stored by the peer: the last message that is wholly here
  uint64_t given_up = 0;      // stored by the peer or by this side's host: no number up to this one will come any more
  uint64_t peer_busy_ns = 0;  // stored by the peer with `arrived`: its busy_ns so far
  uint64_t reserved[5] = {};
  // Before a step's first kernel: its number * kExchangeOps, zeros up to turn_ns, and `turn`.
  uint64_t step = 0;
  uint64_t failure = 0;  // ExchangeFailure of the step; 0: none
  uint32_t blocks_done = 0, unused = 0;
  uint64_t waited_ns = 0;        // in ExchangeAwait, of the step
  uint64_t busy_ns = 0;          // of the step, from what came to what was sent for it; counts on a side that answers
  uint64_t begun_ns = 0;         // when the last message came
  uint64_t turn_ns = 0;          // waited for its turn, of the step
  ExchangeTurn* turn = nullptr;  // that the step takes; null: it takes none
};
static_assert(sizeof(ExchangeWords) == 128);

// kElsewhere: the step failed with another peer, so no peer goes on with it.
enum class ExchangeReason : uint32_t { kNone = 0, kDeadline = 1, kGivenUp = 2, kElsewhere = 3 };
struct ExchangeFailure {
  ExchangeReason reason = ExchangeReason::kNone;
  uint32_t op = 0;
};
constexpr uint64_t EncodeFailure(ExchangeReason reason, uint32_t op) {
  return static_cast<uint64_t>(reason) << 32 | op;
}
constexpr ExchangeFailure DecodeFailure(uint64_t word) {
  return {static_cast<ExchangeReason>(word >> 32), static_cast<uint32_t>(word)};
}

// One side of a micro-batch's exchange, as kernels see it. Device pointers.
struct ExchangeEnd {
  ExchangeWords* own = nullptr;
  ExchangeWords* peer = nullptr;  // the other side's, as mapped here
  uint64_t deadline_ns = 0;       // how long a kernel waits at most
};

// Waits until message `op` of the step is here, then for the step's turn, if any. Past the deadline, or once given up,
// the step has failed: this and its later waits return at once, it sends nothing more, and the peer is told.
struct ExchangeAwaitLaunch {
  ExchangeEnd end;
  uint32_t op = 0;
};

// Tells the peer that message `op` is there, which kernels before this one have stored into its memory.
struct ExchangeSignalLaunch {
  ExchangeEnd end;
  uint32_t op = 0;
};

// Copies to the peer and tells it, in one kernel; waits for message `await_op` before, if that is not negative.
struct ExchangePushLaunch {
  static constexpr int kParts = 3;
  struct Part {
    const void* from = nullptr;
    void* to = nullptr;  // in the peer's memory
    uint64_t bytes = 0;  // these three multiples of 16
  };
  ExchangeEnd end;
  Part parts[kParts];
  uint32_t op = 0;
  int32_t await_op = -1;
  int32_t blocks = 1;
};

// A step whose rows belong to several peers, each row to one: the peers, and where their rows are sent and read. In
// device memory, written before each step, so that a recorded graph does not depend on which peer has which row.
inline constexpr int kMostExchangePeers = 8;
struct ExchangePeer {
  ExchangeEnd end;
  void* query = nullptr;         // in the peer's memory: its rows' q, one below the other; on a 16-byte boundary
  void* key_value = nullptr;     // k likewise, then v
  const void* answer = nullptr;  // here: its rows' o
  int64_t rows = 0;
};
struct ExchangeFan {
  ExchangePeer peers[kMostExchangePeers];
  int32_t count = 0, unused = 0;
};
struct ExchangeRow {
  int32_t peer = 0, row = 0;  // the row-th of the peer's
};

// Rows of bytes from one place to another: a part of what crosses in a step whose sequences are divided among peers.
struct ExchangeCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t from_step = 0, to_step = 0;  // bytes from row to row
  int32_t rows = 0, row_bytes = 0;     // row_bytes, steps and places are multiples of 4
};

// Does the copies, which lie in device memory and were written before the step. With a fan it then tells all of its
// peers that message `op` is there; a step that takes turns gives its turn up, as with KvAppendLaunch.
struct ExchangeCopiesLaunch {
  const ExchangeFan* fan = nullptr;  // null: no peer is told
  const ExchangeCopy* copies = nullptr;
  int32_t count = 0;
  int32_t splits = 1;  // thread blocks a copy
  uint32_t op = 0;
};

// What a token shard gave for some rows of a sequence and some of its heads: o, not yet divided by l, and m and l,
// where m is the greatest score and l the sum of exp(score - m).
struct ExchangePartial {
  const float* o = nullptr;         // [rows][heads][value_dim]
  const float* ml = nullptr;        // [rows][heads][2]
  int32_t first_row = 0, rows = 0;  // among the join's rows
};
struct ExchangeJoin {
  void* o = nullptr;  // of the join's first row and head
  int32_t rows = 0, heads = 0;
  int32_t first_head = 0;        // of the model's
  int32_t first = 0, count = 0;  // which partials: in the order of tokens
  int32_t unused = 0;
};

inline constexpr int32_t kMostJoinUnits = 65535;  // rows times heads of a join

// o of rows whose tokens are divided, in a wire type: the partials of each join, which lie in device memory, in their
// order. The bits of a row and head depend on its partials only.
struct ExchangeJoinsLaunch {
  const ExchangeJoin* joins = nullptr;
  const ExchangePartial* partials = nullptr;
  const float* sinks = nullptr;  // [the model's heads] or null: a further score each, without a value
  int64_t o_row_step = 0;        // elements
  WireType o_type = WireType::kBF16;
  int32_t count = 0;
  int32_t units = 0;      // the most rows * heads of a join
  int32_t value_dim = 0;  // even, 2..256
};

// Gives up the turn of a step that has nothing more to send; kernels that send q, k and v give it up themselves.
struct ExchangeGiveTurnLaunch {
  ExchangeWords* own = nullptr;
  const ExchangeFan* fan = nullptr;  // of a step of several peers; `own` counts for nothing then
};

// Waits until message `op` of every peer is here, then for the step's turn as the first says. If one fails to come,
// the step has failed with all of them: the others are told that nothing more will come.
struct ExchangeAwaitAllLaunch {
  const ExchangeFan* fan = nullptr;
  uint32_t op = 0;
};

// out = the rows' o, in the step's order; behind an ExchangeAwaitAllLaunch.
struct ExchangeGatherLaunch {
  const ExchangeFan* fan = nullptr;
  const ExchangeRow* rows = nullptr;
  void* out = nullptr;    // [count][row_bytes]
  int64_t row_bytes = 0;  // a multiple of 16
  int32_t count = 0;
};

}  // namespace dovetail::kernels::cuda
