-- dead_page: the newest dead letters of a range without their bodies, and how many letters there are in all.
--
-- A dead letter has the body of its request, and Redis copies an entry to look at it. So entries are copied a few at a
-- time, until they have so many bytes together; the caller asks again for the rest of the range.
--
-- KEYS  1 dead
-- ARGV  1 the newest ID of the range, or '+'   2 its oldest ID, or '-': as XREVRANGE takes them
--       3 how many letters at most   4 bytes: after so many no more letters are copied
-- Returns { seconds of Redis's clock; letters in the stream; the oldest ID or ''; the newest ID or ''; 1 if the range
-- has no more; letters... }, each { ID, bytes of the body or -1 if it is gone, correlation_id, content_type, reason,
-- attempts }.
-- O(letters returned), and O(bytes): those given, and those of one step.
-- GRANT admin,console dead xlen xrange xrevrange
local TEXT_BYTES_MAX, STEP_MAX = 400, 64
local SHOWN = { correlation_id = 3, content_type = 4, reason = 5, attempts = 6 }

local function first_id(page)
  return page[1] and page[1][1] or ''
end

local function summary(entry)
  local letter, size = { entry[1], -1, '', '', '', '' }, 0
  local fields = entry[2]
  for f = 1, #fields, 2 do
    local name, value = fields[f], fields[f + 1]
    size = size + #name + #value
    if name == 'body' then letter[2] = #value end
    if SHOWN[name] then letter[SHOWN[name]] = string.sub(value, 1, TEXT_BYTES_MAX) end
  end
  return letter, size
end

local limit, bytes_max = tonumber(ARGV[3]), tonumber(ARGV[4])
local letters, bytes, from, step, is_all = {}, 0, ARGV[1], 1, 0
while #letters < limit and bytes < bytes_max do
  local wanted = math.min(step, limit - #letters)
  local page = redis.call('XREVRANGE', KEYS[1], from, ARGV[2], 'COUNT', wanted)
  for _, entry in ipairs(page) do
    local letter, size = summary(entry)
    letters[#letters + 1], bytes = letter, bytes + size
  end
  if #page < wanted then
    is_all = 1
    break
  end
  from = '(' .. page[#page][1]
  step = math.max(1, math.min(STEP_MAX, math.floor((bytes_max - bytes) / (bytes / #letters))))
end
local oldest = first_id(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1))
local newest = first_id(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1))
return { redis.call('TIME')[1], redis.call('XLEN', KEYS[1]), oldest, newest, is_all, unpack(letters) }
