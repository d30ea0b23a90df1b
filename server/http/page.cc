#include "server/http/page.h"

#include <openssl/evp.h>
#include <openssl/sha.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dovetail::server {
namespace {

// 'sha256-...' of the text in the page's only element of that name.
std::string HashOf(const std::string& element) {
  const std::string begin = absl::StrCat("<", element, ">"), end = absl::StrCat("</", element, ">");
  const std::string_view page = PageText();
  const size_t from = page.find(begin) + begin.size(), to = page.find(end);
  DT_CHECK(to != std::string_view::npos && from < to, "the page has no ", element);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(page.data()) + from, to - from, digest.data());
  std::array<unsigned char, 4 * (SHA256_DIGEST_LENGTH / 3 + 1) + 1> text;
  EVP_EncodeBlock(text.data(), digest.data(), digest.size());
  return absl::StrCat("'sha256-", reinterpret_cast<const char*>(text.data()), "'");
}

std::string Policy() {
  return absl::StrCat("default-src 'none'; script-src ", HashOf("script"), "; style-src ", HashOf("style"),
                      "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                      "frame-ancestors 'none'");
}

}  // namespace

HttpResponse PageResponse() {
  static const std::string policy = Policy();
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.body = PageText();
  response.headers = {{"Content-Security-Policy", policy},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cache-Control", "no-cache"}};
  return response;
}

}  // namespace dovetail::server
