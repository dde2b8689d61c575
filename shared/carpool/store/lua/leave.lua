-- leave: a model process takes no more batches. Its consumer is deleted only if it owns no batch: deleting it would
-- also delete its pending entries, and then no worker could reclaim these batches.
--
-- KEYS  1 workers   2 settled   3.. batches, and the stream of the worker's version, if it has one
-- ARGV  1 consumer  2 maximum length of `settled`
-- Returns 1. O(consumers).
-- GRANT worker workers zrem
-- GRANT worker batches xpending xgroup|delconsumer
-- GRANT worker settled xadd
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'worker', ARGV[1], 'size', 0)
for k = 3, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[k], 'workers', '-', '+', 1, ARGV[1])
  if not pending.err and #pending == 0 then redis.pcall('XGROUP', 'DELCONSUMER', KEYS[k], 'workers', ARGV[1]) end
end
return 1
