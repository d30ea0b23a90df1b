#include "server/http/places.h"

namespace dovetail::server {

void Places::Leave(Entry& entry) {
  if (entry.state == State::kIdle) idle_.erase(entry.at);
  if (entry.state == State::kExtra) extra_.erase(entry.at);
  if (entry.state == State::kIdle || entry.state == State::kBusy) --taken_;
  if (entry.state == State::kEnding) --ending_;
}

Connection* Places::End(std::list<Connection*>& list) {
  Connection* const oldest = list.front();
  Entry& entry = entries_[oldest];
  Leave(entry);
  entry.state = State::kEnding;
  ++ending_;
  return oldest;
}

Places::Admission Places::Add(Connection* connection, Time now) {
  Admission admission;
  admission.placed = taken_ < limit_;
  if (!admission.placed && extra_.size() >= kProbeConnections) admission.end = End(extra_);
  Entry entry;
  entry.since = now;
  entry.state = admission.placed ? State::kIdle : State::kExtra;
  std::list<Connection*>& list = admission.placed ? idle_ : extra_;
  entry.at = list.insert(list.end(), connection);
  taken_ += admission.placed;
  entries_[connection] = entry;
  return admission;
}

void Places::Remove(Connection* connection) {
  const auto found = entries_.find(connection);
  if (found == entries_.end()) return;
  Leave(found->second);
  entries_.erase(found);
}

void Places::Idle(Connection* connection, Time now) {
  const auto found = entries_.find(connection);
  if (found == entries_.end() || found->second.state != State::kBusy) return;
  found->second.state = State::kIdle;
  found->second.since = now;
  found->second.at = idle_.insert(idle_.end(), connection);
}

void Places::Busy(Connection* connection) {
  const auto found = entries_.find(connection);
  if (found == entries_.end() || found->second.state != State::kIdle) return;
  idle_.erase(found->second.at);
  found->second.state = State::kBusy;
}

Places::Place Places::Take(Connection* connection, Time now, std::chrono::nanoseconds min_idle) {
  const auto found = entries_.find(connection);
  if (found == entries_.end() || found->second.state != State::kExtra) return {};
  Place place;
  if (taken_ >= limit_) {
    if (idle_.empty() || ending_ >= kEndingConnections || now - entries_[idle_.front()].since < min_idle) return {};
    place.end = End(idle_);
  }
  if (taken_ >= limit_) return place;  // the limit was lowered: the end of one is not enough
  Leave(found->second);
  found->second.state = State::kBusy;
  ++taken_;
  place.placed = true;
  return place;
}

void Places::Keep(Connection* connection) {
  const auto found = entries_.find(connection);
  if (found == entries_.end() || found->second.state != State::kEnding) return;
  Leave(found->second);
  found->second.state = State::kBusy;
  ++taken_;
}

Connection* Places::EndOne() {
  if (ending_ > 0) return nullptr;  // that one first
  if (!idle_.empty()) return End(idle_);
  if (!extra_.empty()) return End(extra_);
  return nullptr;
}

}  // namespace dovetail::server
