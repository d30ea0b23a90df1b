#pragma once

namespace dovetail {

// From now on a signal that ends this process because of a fault (SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL) first
// writes to stderr which one it was and the functions that the thread was in. Nothing of the process's memory is
// written, so prompts and keys are not. `program` is argv[0], which must stay. A sanitizer's own report takes its
// place.
//   Threads: once, before any other thread is started
void ReportCrashes(const char* program);

}  // namespace dovetail
