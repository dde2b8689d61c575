-- owns_batch(batches, consumer, batch_id, epoch): whether this consumer owns the batch, and took it at this epoch.
-- XACK and XCLAIM do not check their caller, so `answer` and `commit` begin with this. `renew` makes the same check by
-- itself, once for each batch. O(1).
-- GRANT worker batches xpending
local function owns_batch(batches, consumer, batch_id, epoch)
  local owner = redis.call('XPENDING', batches, 'workers', batch_id, batch_id, 1)[1]
  return owner and owner[2] == consumer and owner[4] == tonumber(epoch)
end

