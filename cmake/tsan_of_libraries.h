#pragma once
// Included before everything else under ThreadSanitizer. Headers of protobuf, gRPC and Abseil read
// __SANITIZE_THREAD__ and then lay out some of their types in another way: protobuf's map fields have two more members.
// The libraries of the system were built without it, so what was compiled with it crashes where it meets them. The
// standard library is all in its headers, and needs to know (shared_ptr): it notes it in _GLIBCXX_TSAN.
#include <cstddef>
#undef __SANITIZE_THREAD__
#define DOVETAIL_TSAN 1  // for what is ours
