-- undrain_worker: a worker that an operator drained takes batches again. It learns of it at its heartbeat.
--
-- KEYS  1 drained  2 audit
-- ARGV  1 worker   2 who    3 by which way  4 maximum length of the audit
-- Returns the order that it had; nothing if there was none. O(1).
-- GRANT admin,console drained hget hdel
local order = redis.call('HGET', KEYS[1], ARGV[1])
if not order then return false end
redis.call('HDEL', KEYS[1], ARGV[1])
local is_read, told = pcall(cjson.decode, order)
local drained_by = is_read and type(told) == 'table' and told.who
write_audit(KEYS[2], { ARGV[2], ARGV[3], ARGV[4] }, 'drain undone', {
  worker = ARGV[1], ['drained by'] = type(drained_by) == 'string' and drained_by or nil,
})
return order
