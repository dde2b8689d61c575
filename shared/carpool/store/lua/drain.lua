-- drain: a process takes no more batches, and leaves when it has finished those that it has. One of a bound model
-- begins no more sequences, and leaves when those that it has have ended. Those that have left are forgotten.
--
-- KEYS  1 draining   2 settled   3 workers
-- ARGV  1 consumer  2 maximum length of `settled`
-- Returns how many other processes of the model live and do not drain. O(processes).
-- GRANT worker draining smembers sismember sadd srem pexpire
-- GRANT worker settled xadd
-- GRANT worker workers zscore zrangebyscore
local DRAINING_TTL_MS = 24 * 3600 * 1000
redis.call('SREM', KEYS[1], ARGV[1]) -- must be the first write: see deliver.lua
for _, process in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if not redis.call('ZSCORE', KEYS[3], process) then redis.call('SREM', KEYS[1], process) end
end
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], DRAINING_TTL_MS)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'worker', ARGV[1], 'size', 0)
local others, time = 0, redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, process in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], now_ms, '+inf')) do
  others = others + 1 - redis.call('SISMEMBER', KEYS[1], process)
end
return others
