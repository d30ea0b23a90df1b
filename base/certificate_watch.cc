#include "base/certificate_watch.h"

#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdio>
#include <ctime>
#include <memory>

#include "base/thread_name.h"

namespace dovetail {

int64_t CertificateEnd(const std::string& pem_file) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(pem_file.c_str(), "r"),
                                                   [](FILE* open) { return open == nullptr ? 0 : std::fclose(open); });
  if (file == nullptr) return 0;
  const std::unique_ptr<X509, void (*)(X509*)> certificate(PEM_read_X509(file.get(), nullptr, nullptr, nullptr),
                                                           X509_free);
  std::tm end{};
  if (certificate == nullptr || ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &end) != 1) return 0;
  return timegm(&end);
}

CertificateWatch::CertificateWatch(const std::string& pem_file) : file_(pem_file) {
  if (file_.empty()) return;
  end_ = CertificateEnd(file_);
  thread_ = std::thread([this] {
    NameThread("dt-certificate");
    MutexLock lock(mutex_);
    while (!wake_.wait_for(lock, absl::ToChronoMilliseconds(kEvery),
                           [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; })) {
      lock.unlock();
      const int64_t end = CertificateEnd(file_);
      if (end != 0) end_ = end;  // a file that is being replaced says nothing
      lock.lock();
    }
  });
}

CertificateWatch::~CertificateWatch() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

}  // namespace dovetail
