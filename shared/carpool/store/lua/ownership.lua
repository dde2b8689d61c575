-- entry_of(batch_id): the ID of the entry that a batch is. Behind an `@` is the version whose stream that is in.
local function entry_of(batch_id) return string.match(batch_id, '^[^@]+') end

-- owns_batch(batches, consumer, batch_id, epoch): whether this consumer owns the batch, and took it at this epoch.
-- XACK and XCLAIM do not check their caller, so `answer` and `commit` begin with this. `renew` makes the same check by
-- itself, once for each batch. O(1).
-- GRANT worker batches xpending
local function owns_batch(batches, consumer, batch_id, epoch)
  local id = entry_of(batch_id)
  local owner = redis.call('XPENDING', batches, 'workers', id, id, 1)[1]
  return owner and owner[2] == consumer and owner[4] == tonumber(epoch)
end

