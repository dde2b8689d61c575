-- admit: put the tickets of waiting requests at the end of the order, before any of these requests may be dispatched.
-- A ticket that is in the order already stays where it is, so repeating the script changes nothing.
--
-- KEYS  1 order   2 held
-- ARGV  list of entries: entry ID, list of the tickets of its requests
-- Returns the number of tickets in the order: of requests that wait or are in flight, and of withheld results.
-- O(tickets).
redis.pcall('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
local take = argument_reader(1)
for _ = 1, tonumber(take()) do
  local value = waiting_in(take())
  for _ = 1, tonumber(take()) do
    local ticket = take()
    if redis.pcall('HSETNX', KEYS[2], ticket, value) == 1
      and type(redis.pcall('RPUSH', KEYS[1], ticket)) ~= 'number' then
      redis.call('HDEL', KEYS[2], ticket) -- the key `order` has another type: do without the order
    end
  end
end
local tickets = redis.pcall('LLEN', KEYS[1])
return type(tickets) == 'number' and tickets or 0
