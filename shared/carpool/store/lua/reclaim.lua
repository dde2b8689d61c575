-- reclaim: take over one batch whose owner's lease ran out. XCLAIM raises its delivery count, which is the new
-- epoch: commits and renewals of the old owner are fenced from now on.
--
-- KEYS  1 progress prefix (the key of batch ID ''; the ID is appended)   2 batches   3 the stream of the worker's
--       version, if it has one
-- ARGV  1 consumer  2 lease (ms)  3 what follows an entry ID in the batch IDs of the second stream
-- Returns nil if there is none, or { entry ID, fields, epoch, progress as field, value, ... }
-- O(1), and O(bytes of the batch).
-- GRANT worker batches xpending xclaim xack
-- GRANT worker progress hgetall
for k = 2, #KEYS do
  local pending = redis.call('XPENDING', KEYS[k], 'workers', 'IDLE', ARGV[2], '-', '+', 1)[1]
  if pending then
    local id = pending[1]
    local claimed = redis.call('XCLAIM', KEYS[k], 'workers', ARGV[1], ARGV[2], id)[1]
    if claimed and claimed[2] then
      local batch_id = k == 2 and id or id .. ARGV[3]
      return { id, claimed[2], pending[4] + 1, redis.call('HGETALL', KEYS[1] .. batch_id) }
    end
    redis.call('XACK', KEYS[k], 'workers', id) -- the entry was deleted by hand
  end
end
return nil
