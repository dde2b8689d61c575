-- change: an operator changes fields of a hash of a model: overrides of settings, or shares of its traffic. The
-- batcher learns of it from `settled`, and the audit has the values before and after.
--
-- KEYS  1 the hash  2 settled  3 audit
-- ARGV  1 what is told in `settled`  2 maximum length of `settled`  3 who  4 by which way  5 maximum length of the
--       audit  6 the action  7 '1' to remove all other fields, else ''  8 the number of fields to be removed
--       9.. these; then field and value of each that is set
-- Returns the number of fields that changed. O(fields).
-- GRANT admin,console config hgetall hdel hset
-- GRANT admin,console,control shares hgetall hdel hset
-- GRANT admin,console,control settled xadd
local before = {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do before[flat[i]] = flat[i + 1] end
local after, removed = {}, tonumber(ARGV[8])
for field, value in pairs(ARGV[7] == '1' and {} or before) do after[field] = value end
for i = 9, 8 + removed do after[ARGV[i]] = nil end
for i = 9 + removed, #ARGV, 2 do after[ARGV[i]] = ARGV[i + 1] end

redis.call('HDEL', KEYS[1], '') -- must be the first write: see deliver.lua
local changed, details = 0, {}
for field, value in pairs(before) do
  if after[field] == nil then
    redis.call('HDEL', KEYS[1], field)
    details[field] = of_change(value, nil)
    changed = changed + 1
  end
end
for field, value in pairs(after) do
  if before[field] ~= value then
    redis.call('HSET', KEYS[1], field, value)
    details[field] = of_change(before[field], value)
    changed = changed + 1
  end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'config', ARGV[1], 'size', 0)
if changed > 0 then write_audit(KEYS[3], { ARGV[3], ARGV[4], ARGV[5] }, ARGV[6], details) end
return changed
