-- resume: a model that is paused is dispatched again.
--
-- KEYS  1 paused  2 settled  3 audit
-- ARGV  1 maximum length of `settled`  2 who  3 by which way  4 maximum length of the audit
-- Returns the hash `paused` as it was; empty if the model was not paused. O(1).
-- GRANT admin,console paused hgetall del
-- GRANT admin,console settled xadd
local before = redis.call('HGETALL', KEYS[1])
if #before == 0 then return before end
redis.call('DEL', KEYS[1]) -- must be the first write: see deliver.lua
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[1], '*', 'config', 'paused', 'size', 0)
local details = {}
for i = 1, #before, 2 do details[before[i]] = before[i + 1] end
local since = tonumber(details.since)
write_audit(KEYS[3], { ARGV[2], ARGV[3], ARGV[4] }, 'resume', {
  mode = details.mode, reason = details.reason ~= '' and details.reason or nil, ['paused by'] = details.who,
  ['paused for'] = since and string.format('%.0f s', (tonumber(now_in_ms()) - since) / 1000),
})
return before
