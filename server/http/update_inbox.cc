#include "server/http/update_inbox.h"

#include <utility>

#include "server/http/generation.h"

namespace dovetail::server {

void UpdateInbox::Push(std::shared_ptr<Generation> to, int prompt, requests::GenerationUpdate update) {
  MutexLock lock(mutex_);
  if (!post_) return;
  items_.push_back({std::move(to), prompt, std::move(update)});
  if (items_.size() == 1) post_([self = shared_from_this()] { self->Deliver(); });
}

void UpdateInbox::Close() {
  std::vector<Item> dropped;
  MutexLock lock(mutex_);
  post_ = nullptr;
  dropped.swap(items_);
}

void UpdateInbox::Deliver() {
  std::vector<Item> items;
  {
    MutexLock lock(mutex_);
    items.swap(items_);
  }
  for (const Item& item : items) item.to->OnUpdate(item.prompt, item.update);
}

}  // namespace dovetail::server
