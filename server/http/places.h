#pragma once
#include <chrono>
#include <cstddef>
#include <list>
#include <unordered_map>

#include "server/http/open_files.h"

namespace dovetail::server {

class Connection;

// Which connections may make requests of any kind. There are as many places as a limit says. A few connections more are
// let in without a place, for probes: it shows with the request what a connection is for, and a client that sends none
// must not keep a probe out, so that the oldest of them ends for a new one. A request that is no probe takes a place
// that is free, or that of the connection that has been idle longest. Connections are only names here.
// Threads: thread-compatible; a value.
class Places {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Places(int limit) : limit_(limit) {}
  void SetLimit(int limit) { limit_ = limit; }  // connections keep the places they have
  int limit() const { return limit_; }
  int taken() const { return taken_; }

  // No connection may be added: too many that are to end have not ended yet.
  bool Full() const { return taken_ >= limit_ && extra_.size() >= kProbeConnections && ending_ >= kEndingConnections; }
  struct Admission {
    bool placed = false;
    Connection* end = nullptr;  // to be ended for it
  };
  // A new connection, idle until Busy() says otherwise.
  Admission Add(Connection* connection, Time now);
  void Remove(Connection* connection);

  void Idle(Connection* connection, Time now);
  void Busy(Connection* connection);

  struct Place {
    bool placed = false;
    Connection* end = nullptr;  // to be ended, whether or not there is a place by that
  };
  // For a connection without a place, whose request needs one. Ends only what has been idle for `min_idle`.
  Place Take(Connection* connection, Time now, std::chrono::nanoseconds min_idle);
  // What was to be ended has begun a request: it keeps its place, even beyond the limit.
  void Keep(Connection* connection);

  // There is no descriptor for any connection more: the one to be ended, or null. Idle ones first, the oldest first.
  Connection* EndOne();

 private:
  enum class State { kIdle, kBusy, kExtra, kEnding };
  struct Entry {
    State state = State::kBusy;
    Time since;
    std::list<Connection*>::iterator at;  // in idle_ or extra_, by state
  };
  void Leave(Entry& entry);  // its list, and its place
  Connection* End(std::list<Connection*>& list);

  int limit_;
  int taken_ = 0;  // kIdle and kBusy
  int ending_ = 0;
  std::list<Connection*> idle_, extra_;  // the oldest first
  std::unordered_map<Connection*, Entry> entries_;
};

}  // namespace dovetail::server
