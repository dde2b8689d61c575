-- trim_dead: drop the oldest dead letters of a model, until there are no more than its settings allow, and count them.
--
-- The settings are read here, not in each batch: an override then holds at once, and batches carry nothing for it.
-- The bytes are what the stream takes of Redis's memory. Redis knows them without copying a body, but not those of a
-- single dead letter. So about as many are dropped as are too many by the mean size, but at least an eighth, which
-- ends soon whatever the sizes are.
--
-- KEYS  1 dead   2 dead_dropped   3 config   4 model (the registration)
-- ARGV  1.. for each of SETTINGS its default, for when neither of these hashes has it or may be read
-- Returns how many were dropped for each of SETTINGS.
-- O(dropped + length of the stream), of which each takes less than 0.1 us.
-- GRANT worker dead xtrim xlen memory|usage
-- GRANT worker dead_dropped hincrby
-- GRANT worker registration,config hget
local SETTINGS = { 'max_dead_letter_age_ms', 'max_dead_letters', 'max_dead_letter_bytes' }
local AGE, NUMBER, BYTES = 1, 2, 3

local function bound(s)
  for k = 3, 4 do
    local text = redis.pcall('HGET', KEYS[k], SETTINGS[s])
    local value = type(text) == 'string' and tonumber(text)
    if value and value >= 1 then return value end
  end
  return tonumber(ARGV[s])
end

local function trim(how, limit)
  return redis.call('XTRIM', KEYS[1], how, '=', string.format('%.0f', limit))
end

local dropped = { 0, 0, 0 }
local now_ms = tonumber(redis.call('TIME')[1]) * 1000
dropped[AGE] = trim('MINID', math.max(0, now_ms - bound(AGE)))
dropped[NUMBER] = trim('MAXLEN', bound(NUMBER))
local bytes_max = bound(BYTES)
while true do
  local length, bytes = redis.call('XLEN', KEYS[1]), redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0)
  if length == 0 or bytes <= bytes_max then break end
  local kept = math.min(math.floor(length * bytes_max / bytes), length - math.ceil(length / 8))
  dropped[BYTES] = dropped[BYTES] + trim('MAXLEN', kept)
end
for s, number in ipairs(dropped) do
  if number > 0 then redis.call('HINCRBY', KEYS[2], SETTINGS[s], number) end
end
return dropped
