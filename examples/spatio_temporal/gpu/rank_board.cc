#include "examples/spatio_temporal/gpu/rank_board.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::spatio_temporal {

RankBoard::RankBoard(int ranks, absl::Duration stall)
    : ranks_(ranks), stall_(stall), told_(static_cast<size_t>(ranks) * ranks), met_(ranks) {}

void RankBoard::Tell(int source, int destination, int64_t stage, int64_t frames, Event event) {
  const MutexLock lock(mutex_);
  told_[source * ranks_ + destination].push_back({stage, frames, std::move(event)});
  changed_.notify_all();
}

template <typename Ready>
absl::Status RankBoard::WaitUntil(MutexLock& lock, int rank, const char* what, Ready ready) {
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !failed_.ok() || ready(); };
  if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(stall_), done))
    return absl::UnavailableError(absl::StrCat("rank ", rank, " waited ", absl::FormatDuration(stall_), " for ", what,
                                               "; --stall says for how long it may"));
  return failed_;
}

absl::StatusOr<RankBoard::Event> RankBoard::Await(int source, int destination, int64_t stage, int64_t frames) {
  MutexLock lock(mutex_);
  std::deque<Told>& told = told_[source * ranks_ + destination];
  const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (!told.empty() && std::pair(told.front().stage, told.front().frames) < std::pair(stage, frames))
      told.pop_front();
    return !told.empty();
  };
  DT_RETURN_IF_ERROR(WaitUntil(lock, destination, "what another rank sends", reached));
  return told.front().event;
}

absl::Status RankBoard::Meet(int rank) {
  MutexLock lock(mutex_);
  const int64_t mine = ++met_[rank];
  changed_.notify_all();
  return WaitUntil(lock, rank, "the other ranks to come as far",
                   [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return std::ranges::min(met_) >= mine; });
}

void RankBoard::Fail(int rank, const absl::Status& status) {
  const MutexLock lock(mutex_);
  if (failed_.ok())
    failed_ = absl::UnavailableError(absl::StrCat("rank ", rank, " failed: ", std::string(status.message())));
  changed_.notify_all();
}

}  // namespace dovetail::spatio_temporal
