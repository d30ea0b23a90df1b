#include "server/http/cors.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/http/responses.h"

namespace dovetail::server {
namespace {

constexpr size_t kMostItems = 256;
constexpr char kPreflightSeconds[] = "600";  // how long a browser may remember an answer
constexpr const char* kApiMethods[] = {"GET", "HEAD", "POST", "OPTIONS"};

bool IsToken(const std::string& text) {
  const auto good = [](unsigned char c) { return absl::ascii_isalnum(c) || absl::StrContains("!#$%&'*+-.^_`|~", c); };
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), good);
}

// As browsers spell one: scheme and host, in lower case, and a port that is not the scheme's own; or "null".
bool IsOrigin(const std::string& text) {
  if (text == "null") return true;
  const size_t colon = text.find("://");
  if (colon == std::string::npos || colon == 0 || text.size() <= colon + 3 || text.size() > 512) return false;
  for (const unsigned char c : text)
    if (c <= 0x20 || c >= 0x7f || absl::ascii_isupper(c) || c == ',') return false;
  return text.find_first_of("/?#@*", colon + 3) == std::string::npos;
}

bool Has(const std::vector<std::string>& list, const std::string& item) {
  return std::any_of(list.begin(), list.end(), [&](const auto& one) { return absl::EqualsIgnoreCase(one, item); });
}

absl::Status CheckTokens(const char* flag, const std::vector<std::string>& list) {
  for (const std::string& item : list)
    if (!IsToken(item)) return InvalidArgument(flag, ": '", item, "' is no name; write [\"*\"] or a list of names");
  if (list.size() > kMostItems) return InvalidArgument(flag, ": has more than ", kMostItems, " items");
  return absl::OkStatus();
}

std::vector<std::string> HeaderNames(const std::string& list) {
  std::vector<std::string> names = absl::StrSplit(list, ',');
  for (std::string& name : names) absl::StripAsciiWhitespace(&name);
  return names;
}

HttpResponse Disallowed(const std::string& what) {
  return ErrorResponse(403, "invalid_request_error",
                       absl::StrCat("This server does not let web pages ", what,
                                    " (--allowed-origins, --allowed-methods, --allowed-headers)."),
                       "cors_not_allowed");
}

}  // namespace

absl::Status CorsOptions::Validate() const {
  if (origins.size() > kMostItems) return InvalidArgument("--allowed-origins: has more than ", kMostItems, " items");
  for (const std::string& origin : origins) {
    if (origin == "*" && origins.size() > 1)
      return InvalidArgument("--allowed-origins: \"*\" allows every page; give it alone, or name the others");
    if (origin != "*" && !IsOrigin(origin))
      return InvalidArgument("--allowed-origins: '", origin,
                             "' is no origin; write scheme, host and port as a browser does, without a path, as "
                             "https://chat.example.com or http://localhost:3000");
  }
  if (credentials && Has(origins, "*"))
    return InvalidArgument(
        "--allow-credentials: with --allowed-origins [\"*\"] every web page could use a browser's "
        "certificate; name the origins");
  if (credentials && origins.empty()) return InvalidArgument("--allow-credentials: give --allowed-origins too");
  DT_RETURN_IF_ERROR(CheckTokens("--allowed-methods", methods));
  return CheckTokens("--allowed-headers", headers);
}

bool Cors::AllowsOrigin(const std::string& origin) const {
  return AnyOrigin() || std::find(options_.origins.begin(), options_.origins.end(), origin) != options_.origins.end();
}

std::vector<std::pair<std::string, std::string>> Cors::HeadersFor(const RequestHead& head) const {
  std::vector<std::pair<std::string, std::string>> headers;
  if (options_.origins.empty()) return headers;
  // Caches must not give one origin the answer for another.
  if (!AnyOrigin()) headers.emplace_back("Vary", "Origin");
  const std::string* origin = head.Find("origin");
  if (origin == nullptr || !AllowsOrigin(*origin)) return headers;
  headers.emplace_back("Access-Control-Allow-Origin", AnyOrigin() ? "*" : *origin);
  if (options_.credentials) headers.emplace_back("Access-Control-Allow-Credentials", "true");
  headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  return headers;
}

std::optional<HttpResponse> Cors::Preflight(const RequestHead& head) const {
  const std::string* origin = head.Find("origin");
  const std::string* method = head.Find("access-control-request-method");
  if (options_.origins.empty() || head.method != "OPTIONS" || origin == nullptr || method == nullptr)
    return std::nullopt;
  if (!AllowsOrigin(*origin)) return Disallowed("of this origin ask");
  const std::vector<std::string> methods =
      Has(options_.methods, "*") ? std::vector<std::string>(std::begin(kApiMethods), std::end(kApiMethods))
                                 : options_.methods;
  if (!Has(methods, *method)) return Disallowed("use this method");
  HttpResponse response;
  response.content_type = "text/plain; charset=utf-8";
  response.headers = {{"Access-Control-Allow-Methods", absl::StrJoin(methods, ", ")},
                      {"Access-Control-Max-Age", kPreflightSeconds}};
  if (const std::string* asked = head.Find("access-control-request-headers")) {
    for (const std::string& name : HeaderNames(*asked))
      if (!IsToken(name) || (!Has(options_.headers, "*") && !Has(options_.headers, name)))
        return Disallowed("send the headers that this one wants to");
    response.headers.emplace_back("Access-Control-Allow-Headers", *asked);
    // The answer repeats what was asked for.
    response.headers.emplace_back("Vary", "Access-Control-Request-Headers");
  }
  return response;
}

}  // namespace dovetail::server
