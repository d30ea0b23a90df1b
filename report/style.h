#pragma once

namespace dovetail::report {

// The style sheet of a report: light and dark as the reader's system has it, one column on a phone. The contrast of
// every text with what lies behind it is at least 4.5.
// Threads: a constant.
extern const char* const kStyle;

}  // namespace dovetail::report
