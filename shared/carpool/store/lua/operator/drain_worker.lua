-- drain_worker: a worker is to take no more batches, until this is undone. It learns of it at its heartbeat. Orders
-- about workers that have ended are forgotten.
--
-- KEYS  1 drained  2 workers  3 draining  4 audit
-- ARGV  1 worker   2 who      3 by which way  4 maximum length of the audit
-- Returns how many processes of it live, 0 if it does not; how many others live and do not drain; the order; and 1 if
-- it is new. O(processes).
-- GRANT admin,console drained hkeys hget hset hdel
-- GRANT admin,console workers zrange zrangebyscore
-- GRANT admin,console draining sismember
local function worker_of(process) return string.match(process, '^[^/]*') end

local now = now_in_ms()
local processes, others, known = 0, 0, {}
redis.call('HDEL', KEYS[1], '') -- must be the first write: see deliver.lua
for _, process in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do known[worker_of(process)] = true end
local drained = {}
for _, worker in ipairs(redis.call('HKEYS', KEYS[1])) do
  drained[worker] = true
  if not known[worker] then redis.call('HDEL', KEYS[1], worker) end
end
for _, process in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now, '+inf')) do
  local worker = worker_of(process)
  if worker == ARGV[1] then
    processes = processes + 1
  elseif not drained[worker] then
    others = others + 1 - redis.call('SISMEMBER', KEYS[3], process)
  end
end
local order = redis.call('HGET', KEYS[1], ARGV[1])
if processes == 0 or order then return { processes, others, order or '', 0 } end
order = cjson.encode({ who = ARGV[2], since = now })
redis.call('HSET', KEYS[1], ARGV[1], order)
write_audit(KEYS[4], { ARGV[2], ARGV[3], ARGV[4] }, 'drain', {
  worker = ARGV[1], processes = tostring(processes), ['others that serve'] = tostring(others),
})
return { processes, others, order, 1 }
