-- hold: a node renews its lease, publishes its report, and says which seats it has, claims and gives back. A seat is
-- its own if nobody has it, or the lease of who has it ran out. Nodes that have been gone for long are forgotten.
--
-- KEYS  1 leases    2 reports          3 seats
-- ARGV  1 its name  2 its lease (ms), 0 if it stops: then all its seats are given back
--       3 its report, empty if it is the same
--       4 for how long (ms) a lease must have run out until its node is forgotten
--       5.. pairs: a seat, and LOADING, SERVING, DRAINING, or FREE
-- Returns the seats that are not its own, or must not be claimed. O(seats).
-- GRANT worker leases zrem zadd zscore zrangebyscore
-- GRANT worker reports hset hdel
-- GRANT worker seats hgetall hget hset hdel
local leases, reports, seats, name = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREM', leases, name) -- must be the first write: see deliver.lua

local function give_back(seat, state)
  if state == 'YIELDED' then redis.call('HSET', seats, seat, 'YIELDED ') else redis.call('HDEL', seats, seat) end
end

if ARGV[2] == '0' then
  redis.call('HDEL', reports, name)
  local all = redis.call('HGETALL', seats)
  for at = 1, #all, 2 do
    local state, node = string.match(all[at + 1], '^(%u+) (.*)$')
    if node == name then
      give_back(all[at], state)
    end
  end
  return {}
end

redis.call('ZADD', leases, now_ms + tonumber(ARGV[2]), name)
if ARGV[3] ~= '' then redis.call('HSET', reports, name, ARGV[3]) end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms - tonumber(ARGV[4]))) do
  redis.call('ZREM', leases, gone)
  redis.call('HDEL', reports, gone)
end

local function lives(node)
  local until_ms = redis.call('ZSCORE', leases, node)
  return until_ms and tonumber(until_ms) > now_ms
end

local refused = {}
for at = 5, #ARGV, 2 do
  local seat, wanted_state = ARGV[at], ARGV[at + 1]
  local state, node = string.match(redis.call('HGET', seats, seat) or '', '^(%u+) (.*)$')
  local is_own = node == name
  if node == '' and wanted_state == 'FREE' then -- its generation is wanted no more
    redis.call('HDEL', seats, seat)
  elseif node and not is_own and (node == '' or lives(node)) then
    refused[#refused + 1] = seat
  elseif wanted_state == 'FREE' or state == 'YIELDED' and not is_own then
    give_back(seat, state)
    if wanted_state ~= 'FREE' then refused[#refused + 1] = seat end
  elseif state ~= 'YIELDED' then -- else it remains so until it is given back
    redis.call('HSET', seats, seat, wanted_state .. ' ' .. name)
  end
end
return refused
