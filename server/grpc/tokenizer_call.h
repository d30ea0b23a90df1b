#pragma once
#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "proto/control/vllm_engine.pb.h"

namespace dovetail::server {

// A model's tokenizer files as GetTokenizer sends them.
struct TokenizerArchive {
  std::string zip;     // zip_archive.h
  std::string sha256;  // of it, in hexadecimal digits
};

// One GetTokenizer call: the archive in pieces, the last of which has the digest. Deletes itself once the call is over.
// Threads: gRPC's, one at a time
class TokenizerCall final : public grpc::ServerWriteReactor<vllm::grpc::engine::GetTokenizerChunk> {
 public:
  static constexpr size_t kPieceBytes = size_t{64} << 10;

  // `archive` null: `why` is the call's end. `on_end` is told the code by which the call ended.
  TokenizerCall(std::shared_ptr<const TokenizerArchive> archive, const grpc::Status& why,
                std::function<void(const grpc::Status&)> on_end);

  void OnWriteDone(bool ok) override;
  void OnDone() override;

 private:
  void WriteNext();

  const std::shared_ptr<const TokenizerArchive> archive_;
  const std::function<void(const grpc::Status&)> on_end_;
  vllm::grpc::engine::GetTokenizerChunk piece_;
  size_t at_ = 0;
  grpc::Status end_;
};

}  // namespace dovetail::server
