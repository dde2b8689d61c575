-- join: a model process is ready for batches. It gets a lease, and the batcher learns of it from `settled` (size 0).
-- Consumers whose process died without `leave` are deleted, if they own no batch.
--
-- KEYS  1 workers   2 settled   3.. batches, and the stream of the worker's version, if it has one
-- ARGV  1 consumer  2 lease (ms)  3 maximum length of `settled`
-- Returns 1. O(consumers).
-- GRANT worker workers zadd zrem zscore
-- GRANT worker batches xinfo|consumers xgroup|delconsumer
-- GRANT worker settled xadd
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREM', KEYS[1], ARGV[1]) -- must be the first write: see deliver.lua
redis.call('ZADD', KEYS[1], now_ms + tonumber(ARGV[2]), ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'worker', ARGV[1], 'size', 0)
for k = 3, #KEYS do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[k], 'workers') -- a stream of a version may be gone
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    -- name, <name>, pending, <count>, idle, <ms>
    if consumer[4] == 0 and consumer[6] > 10 * tonumber(ARGV[2])
      and not redis.call('ZSCORE', KEYS[1], consumer[2]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[k], 'workers', consumer[2])
    end
  end
end
return 1
