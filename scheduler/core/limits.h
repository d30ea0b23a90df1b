#pragma once
#include "absl/time/time.h"
#include "base/ids.h"
#include "base/segment_tree.h"

namespace dovetail::scheduler {

// Limits of the scheduler's core.
// Threads: constants.

// Entries with fewer new tokens are not planned as prompts: compute workers do not attend them either.
inline constexpr int kLeastPlannedPrompt = 16;

inline constexpr int kMaxQueuedRequests = 1 << 20;
inline constexpr int kMaxMicroBatches = 16;

// --max-num-batched-tokens where the user gives none. A GPU computes 8,192 rows at its full speed, and a prompt of
// 8,192 tokens in 210 ms where chunks of 512 take 266 (Llama-3-8B's shape, one H200); on a CPU larger chunks are no
// faster, and running streams would wait for them.
inline constexpr int kStepTokensOfCpu = 512;
inline constexpr int kStepTokensOfGpu = 8192;

// --prefill-rank-tokens where the user gives none. A prompt of 2,048 tokens took two GPUs 82 ms and one 48, one of
// 16,384 took them 276 and 489 (two H200s, as above), and while two read a prompt, streams of both wait.
inline constexpr int kRankTokensOfCpu = 1024;
inline constexpr int kRankTokensOfGpu = 4096;

// The least of a prompt in a step for which streams wait (--prefill-itl-budget), unless less is left of it, and the
// most while the rates of the compute worker are not known.
inline constexpr Position kLeastChunk = kSegmentTokens;
inline constexpr Position kChunkBeforeRates = 256;
// And the least of a rank of a prefill group, of which cuts on multiples of 64 may leave it half.
inline constexpr int kLeastRankChunk = 2 * kSegmentTokens;

// How long a request waits for attention workers to say what they hold of its prompt before it is placed without
// knowing.
inline constexpr absl::Duration kProbeTimeout = absl::Milliseconds(10);

// Part of a worker's blocks that admission leaves free, so that running sequences can grow before one must be
// preempted.
inline constexpr double kAdmissionSpare = 0.01;

// How often a step that one sequence has to itself is tried again when a worker says that it is out of memory.
inline constexpr int kOutOfMemoryRetries = 3;

// What a step may give a compute worker that it will remember: token histories, and lists of the sampling. One sequence
// may have more. A plan stays far below what a frame holds.
inline constexpr size_t kMaxBytesGiven = size_t{64} << 20;

// How often a step is sent whose compute worker failed it: gave a result that cannot be read, or none in time. Then its
// requests end.
inline constexpr int kStepAttempts = 3;

// A step's deadline that is noticed so late was missed by the scheduler itself, which was stopped or at work: results
// may lie unread, and come within as long.
inline constexpr absl::Duration kLateTick = absl::Seconds(1);

// A step that a compute worker could not run because it lost an attention worker which is well as far as the scheduler
// knows is tried again so often, for so long, before the sequences on that worker end. News of a loss takes as long as
// a missed heartbeat, and ends the pause.
inline constexpr absl::Duration kUnreachablePause = absl::Milliseconds(10);
inline constexpr absl::Duration kUnreachablePatience = absl::Seconds(5);

// A sequence whose grammar a compute worker still compiles is left out of steps for so long, twice as long each time up
// to the longer of them; after the patience its request ends.
inline constexpr absl::Duration kGrammarPause = absl::Milliseconds(10);
inline constexpr absl::Duration kLongestGrammarPause = absl::Milliseconds(100);
inline constexpr absl::Duration kGrammarPatience = absl::Seconds(60);

// How often in a row one attention worker may refuse to open a sequence before its request ends.
inline constexpr int kMostRefusedOpens = 3;

// How often a sequence begins again because its KV is damaged: without a token in between, and in all. Then its request
// ends. A compute worker that is killed under a step may leave a damaged sequence, too, so the latter is not small.
inline constexpr int kMostDamagesInARow = 3;
inline constexpr int kMostDamages = 100;

// How long a sequence that no attention worker can hold since one was lost waits for another that can.
inline constexpr absl::Duration kReplacementPatience = absl::Seconds(10);

// How long a sequence may be on its way from one attention worker to another before it begins anew instead.
inline constexpr absl::Duration kMoveTimeout = absl::Seconds(10);

// With --placement tiers: the part of a faster worker's blocks that stays free when a sequence comes back to it, so
// that it does not have to leave again soon, and how many tokens it must have left to be worth the pause.
inline constexpr double kSpareToComeBack = 0.1;
inline constexpr int kLeastTokensBack = 64;

// With --placement tiers: the least tokens of an ended sequence that a slower tier is given, the least that a sequence
// fetches from there before its first step, and how many ended sequences are remembered until they were copied.
inline constexpr Position kLeastTokensSpilled = 2 * kSegmentTokens;
inline constexpr Position kLeastTokensFetched = 2 * kSegmentTokens;
inline constexpr size_t kMostEndedPrefixes = 256;
inline constexpr size_t kMostEndedTokens = size_t{4} << 20;

// How fast measured stage times follow the last step, and how many steps pass before the number of micro-batches may
// change by one.
inline constexpr double kStageTimesWeight = 0.125;
inline constexpr int kStepsPerRotation = 32;

}  // namespace dovetail::scheduler
