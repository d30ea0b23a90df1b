#pragma once
#include <string>

#include "report/figure.h"

namespace dovetail::report {

// A report as one HTML document: styles and pictures are in it, it names no other resource, has no script, and its
// Content-Security-Policy forbids both. Every text of the report is escaped. Each picture has a title and a
// description, and the table of its figure below it; figures without data are listed at the end with what is missing.
// Errors: none.
// Threads: pure.
std::string HtmlOf(const Report& report);

}  // namespace dovetail::report
