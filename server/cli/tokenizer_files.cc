#include "server/cli/tokenizer_files.h"

#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/sha256.h"
#include "server/cli/text_file.h"
#include "server/grpc/zip_archive.h"

namespace dovetail::cli {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFiles[] = {
    "tokenizer.json",          "tokenizer_config.json", "config.json",        "generation_config.json",
    "special_tokens_map.json", "added_tokens.json",     "vocab.json",         "merges.txt",
    "tokenizer.model",         "tiktoken.model",        "chat_template.json", "chat_template.jinja"};

}  // namespace

absl::StatusOr<std::shared_ptr<const server::TokenizerArchive>> TokenizerFilesOf(const model::Checkpoint& checkpoint) {
  if (checkpoint.gguf() != nullptr)
    return absl::FailedPreconditionError(
        "the tokenizer is inside a GGUF file, and no file of its own; give the router the model's tokenizer, or serve "
        "a "
        "folder with tokenizer.json");
  std::vector<server::ArchivedFile> files;
  size_t bytes = 0;
  for (const char* name : kFiles) {
    const fs::path path = checkpoint.folder() / name;
    std::error_code error;
    if (!fs::is_regular_file(path, error)) continue;
    bytes += fs::file_size(path, error);
    if (error || bytes > kMaxTokenizerBytes)
      return ResourceExhausted(name, ": the tokenizer's files have more than ", kMaxTokenizerBytes, " bytes");
    DT_ASSIGN_OR_RETURN(std::string text, ReadText(path.string()));
    files.push_back({name, std::move(text)});
  }
  if (files.empty()) return absl::FailedPreconditionError("the model has no tokenizer files");
  auto archive = std::make_shared<server::TokenizerArchive>();
  DT_ASSIGN_OR_RETURN(archive->zip, server::ZipOf(files));
  const Sha256Digest digest = Sha256(std::as_bytes(std::span(archive->zip.data(), archive->zip.size())));
  archive->sha256 =
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  return std::shared_ptr<const server::TokenizerArchive>(std::move(archive));
}

}  // namespace dovetail::cli
