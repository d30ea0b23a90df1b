#pragma once
#include "server/work/admission.h"
#include "server/work/cache_epochs.h"
#include "server/work/work_queue.h"

namespace dovetail::server {

// What the APIs of a server share, so that one limit holds for all of them: the requests that wait to be read, those
// that then wait for their grammar to be compiled, and what each tenant has in the engine; and what each tenant finds
// in the prefix cache. Shared by them; it must outlive whatever has tasks in the queue.
// Threads: thread-safe.
struct Intake {
  Intake(int threads, const WorkLimits& limits) : grammars(1, limits), queue(threads, limits) {}

  void Cancel(CancelToken& token) {
    queue.Cancel(token);
    grammars.Cancel(token);
  }
  void Stop() {  // after it no task runs
    queue.Stop();
    grammars.Stop();
  }
  int waiting() const { return queue.waiting() + grammars.waiting(); }

  Admission admission;
  CacheEpochs cache_epochs;
  WorkQueue grammars;  // tasks that take seconds, which nothing but another grammar waits for
  WorkQueue queue;     // its tasks post to `grammars`; ends first
};

}  // namespace dovetail::server
