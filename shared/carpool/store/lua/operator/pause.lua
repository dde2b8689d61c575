-- pause: nothing of a model is dispatched until it is resumed. If it is paused already, that may change how: since
-- when it is stays, and what was to be refused before still is.
--
-- KEYS  1 paused  2 settled  3 audit                4 the model's registration
-- ARGV  1 mode: wait or refuse  2 reason  3 maximum length of `settled`  4 who  5 by which way  6 maximum length of
--       the audit
-- Returns the hash `paused` as it is now; nothing if the model is not registered. O(1).
-- GRANT admin,console paused hgetall hmget del hset
-- GRANT admin,console registration exists
-- GRANT admin,console settled xadd
if redis.call('EXISTS', KEYS[4]) == 0 then return false end
local before = redis.call('HMGET', KEYS[1], 'mode', 'reason', 'since', 'refuses_from')
local mode, reason, since, refuses_from = before[1], before[2], before[3], before[4]
if mode == ARGV[1] and reason == ARGV[2] then return redis.call('HGETALL', KEYS[1]) end
local now = now_in_ms()
if ARGV[1] ~= 'refuse' then
  refuses_from = ''
elseif mode ~= 'refuse' then
  refuses_from = now
end
redis.call('DEL', KEYS[1]) -- must be the first write: see deliver.lua
redis.call('HSET', KEYS[1], 'mode', ARGV[1], 'reason', ARGV[2], 'who', ARGV[4], 'since', since or now,
  'refuses_from', refuses_from or now)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'config', 'paused', 'size', 0)
local details = { mode = ARGV[1] }
if mode and mode ~= ARGV[1] then details.mode = of_change(mode, ARGV[1]) end
if ARGV[2] ~= '' then details.reason = ARGV[2] end
write_audit(KEYS[3], { ARGV[4], ARGV[5], ARGV[6] }, 'pause', details)
return redis.call('HGETALL', KEYS[1])
