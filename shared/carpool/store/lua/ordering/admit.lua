-- admit: requests that wait take their tickets in the order of results (order.lua), before any of them may leave.
-- Said again, by whomever, it changes nothing.
--
-- KEYS  1 order   2 held
-- ARGV  E, then E times: entry ID, number of tickets, the tickets of its requests
-- Returns how many tickets are taken: requests that wait or are in flight, and results that are held
-- O(tickets).
redis.pcall('HDEL', KEYS[2], '') -- first what Redis allows when memory is full: see deliver
local at = 2
for _ = 1, tonumber(ARGV[1]) do
  local id, tickets = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  for i = at, at + tickets - 1 do
    if redis.pcall('HSETNX', KEYS[2], ARGV[i], 'w' .. id) == 1
      and type(redis.pcall('RPUSH', KEYS[1], ARGV[i])) ~= 'number' then
      redis.call('HDEL', KEYS[2], ARGV[i])
    end
  end
  at = at + tickets
end
local taken = redis.pcall('LLEN', KEYS[1])
return type(taken) == 'number' and taken or 0
