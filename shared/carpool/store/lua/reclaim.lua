-- reclaim: take over one batch whose owner's lease ran out. XCLAIM raises its delivery count, which is the new
-- epoch: commits and renewals of the old owner are fenced from now on.
--
-- KEYS  1 batches   2 progress prefix (the key of batch ID ''; the ID is appended)
-- ARGV  1 consumer  2 lease (ms)
-- Returns nil if there is none, or { batch ID, fields, epoch, progress as field, value, ... }
-- O(1), and O(bytes of the batch).
-- GRANT worker batches xpending xclaim xack
-- GRANT worker progress hgetall
local pending = redis.call('XPENDING', KEYS[1], 'workers', 'IDLE', ARGV[2], '-', '+', 1)[1]
if not pending then return nil end
local id = pending[1]
local claimed = redis.call('XCLAIM', KEYS[1], 'workers', ARGV[1], ARGV[2], id)[1]
if not claimed or not claimed[2] then
  redis.call('XACK', KEYS[1], 'workers', id) -- the entry was deleted by hand
  return nil
end
return { id, claimed[2], pending[4] + 1, redis.call('HGETALL', KEYS[2] .. id) }
