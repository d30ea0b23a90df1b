#pragma once
#include <string_view>

#include "server/http/exchange.h"

namespace dovetail::server {

// The built-in page (server/page/): a chat, the cluster live and the API's description, as one HTML text that needs
// nothing from outside.
// Threads: immutable.
std::string_view PageText();

// It as an answer, with a Content-Security-Policy under which the browser runs its script and no other.
HttpResponse PageResponse();

}  // namespace dovetail::server
