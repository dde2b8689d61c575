-- Reading ARGV where it holds nested lists. A list is the number of its elements, followed by the elements; each
-- element may be one argument, or several, or contain a list itself. `carpool.store.arguments` writes this format.

-- argument_reader(first): a function that returns ARGV[first] when called, then the argument after it, and so on.
local function argument_reader(first)
  local index = first - 1
  return function()
    index = index + 1
    return ARGV[index]
  end
end

-- take_list(take): read a list whose elements are one argument each. O(elements).
local function take_list(take)
  local list = {}
  for i = 1, tonumber(take()) do list[i] = take() end
  return list
end

-- collect_arguments(): free the memory of KEYS and ARGV now, if they are many; for the end of a script. Lua keeps
-- strings in chains by their hash, and looks for each new one among those there, also among those of earlier scripts
-- that were not collected yet. Redis 6 does not hash every byte, so producers can choose IDs with one hash.
-- O(arguments).
local COLLECTED_KEYS_MIN = 1000
local function collect_arguments()
  if #KEYS < COLLECTED_KEYS_MIN then return end
  for i = #KEYS, 1, -1 do KEYS[i] = nil end
  for i = #ARGV, 1, -1 do ARGV[i] = nil end
  collectgarbage()
end
