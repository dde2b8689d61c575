-- What is wanted of a model: a list of its generations, as JSON in a field of the hash `wanted`.
--
--   generation         its number
--   entry, version     of the repository
--   parameters         a JSON map, as text, of which equal ones have the same text
--   settings           of the model that the load sets, likewise
--   replicas           how many seats it has: 0 .. replicas - 1
--   share              per cent of the traffic; absent for the one generation that is to serve all the rest
--   settled            all its seats served once, so it is what remains if a newer generation cannot be loaded
--   leaving            another generation replaces it: it goes when that has settled
--   failed             it could not be loaded
--
-- A seat is a field of the hash `seats`, `GENERATION/NUMBER`: `STATE NODE`. Without a field anyone may claim it.
--
--   LOADING, SERVING   what the process of its node does
--   DRAINING           it is wanted no more, and its process finishes what it has
--   YIELDED            of a generation that leaves: its node gives it up, and then nobody claims it (`YIELDED `)
--
-- GRANT admin,console,control,worker wanted hget hset hdel
-- GRANT admin,console,control,worker seats hget hset hdel
-- GRANT admin,console,control,worker outcomes hsetnx hdel

-- generations_of(wanted, model): the list; empty if the field is malformed, because a user wrote it.
local function generations_of(wanted, model)
  redis.call('HDEL', wanted, '') -- must be the first write: see deliver.lua
  local text = redis.call('HGET', wanted, model)
  local is_read, generations = pcall(cjson.decode, text or '[]')
  return is_read and type(generations) == 'table' and generations or {}
end

local function write_generations(wanted, model, generations)
  if #generations > 0 then
    redis.call('HSET', wanted, model, cjson.encode(generations))
  else
    redis.call('HDEL', wanted, model)
  end
end

-- seat_of(seats, generation, index): its name, its state and its node; no state if nobody has it.
local function seat_of(seats, generation, index)
  local name = string.format('%d/%d', generation.generation, index)
  local state, node = string.match(redis.call('HGET', seats, name) or '', '^(%u+) (.*)$')
  return name, state, node
end

-- conclude(outcomes, generation, outcome): what became of a generation, for who waits for it. The first one counts.
local function conclude(outcomes, generation, outcome)
  redis.call('HSETNX', outcomes, generation.generation, outcome)
end

-- remove(seats, outcomes, generations, at, outcome): it is wanted no more. Its nodes give its seats back.
local function remove(seats, outcomes, generations, at, outcome)
  local generation = table.remove(generations, at)
  conclude(outcomes, generation, outcome)
  for index = 0, generation.replicas - 1 do
    local name, state, node = seat_of(seats, generation, index)
    if state == 'YIELDED' and node == '' then redis.call('HDEL', seats, name) end
  end
end

-- leave(seats, outcomes, generations, outcome): all of these but those with a share, or the one that is kept, leave.
-- Of one that did not settle only what serves remains, for as long as it takes.
local function leave(seats, outcomes, generations, kept, outcome)
  for at = #generations, 1, -1 do
    local generation = generations[at]
    if generation ~= kept then
      generation.leaving = true
      local serves = generation.settled
      if not generation.settled then
        conclude(outcomes, generation, outcome)
        for index = 0, generation.replicas - 1 do
          local name, state, node = seat_of(seats, generation, index)
          if state == 'SERVING' then
            serves = true
          elseif state ~= 'DRAINING' then
            redis.call('HSET', seats, name, 'YIELDED ' .. (node or ''))
          end
        end
      end
      if not serves then remove(seats, outcomes, generations, at, outcome) end
    end
  end
end

-- stay(seats, generation): it leaves no more, and its seats are to be claimed again.
local function stay(seats, generation)
  generation.leaving = nil
  for index = 0, generation.replicas - 1 do
    local name, state, node = seat_of(seats, generation, index)
    if state == 'YIELDED' then
      if node == '' then
        redis.call('HDEL', seats, name)
      else
        redis.call('HSET', seats, name, 'DRAINING ' .. node)
      end
    end
  end
end

-- restore(seats, outcomes, generations): if none is left that is to stay, the newest one that settled does; if none
-- has settled, the newest one that serves; if none serves, the newest one whose process ended since another one was to
-- replace it. One that could not be loaded does not. It has an outcome: that is over.
local function restore(seats, outcomes, generations)
  local settled, serving, served
  for _, generation in ipairs(generations) do
    if not generation.leaving and not generation.share then return end
    if generation.settled and generation.leaving then settled = generation end
    if not generation.settled and not generation.failed and not generation.share then
      served = generation
      for index = 0, generation.replicas - 1 do
        local _, state = seat_of(seats, generation, index)
        if state == 'SERVING' then serving = generation end
      end
    end
  end
  local newest = settled or serving or served
  if not newest then return end
  if newest ~= settled then redis.call('HDEL', outcomes, newest.generation) end
  stay(seats, newest)
  return newest
end
