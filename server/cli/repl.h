#pragma once
#include "base/status.h"
#include "server/cli/conversation.h"

namespace dovetail::cli {

// Reads messages from the terminal and shows the answers until Ctrl-D or /exit. A line that ends in \ goes on in the
// next one, and lines between """ and """ are one message; Ctrl-C ends an answer, or empties a line. Commands: /system,
// /clear, /help, /exit.
// Threads: the main thread only.
absl::Status RunRepl(Conversation& conversation);

}  // namespace dovetail::cli
