// One library called from 16 threads at once.
#include <thread>

#include "common.h"

int main(int argc, char** argv) {
  const std::string folder = argv[1];
  const auto library = attentune::Library::open(folder + "/attention.so", 2);
  const int calls = count_calls(folder), turns = argc > 2 ? std::atoi(argv[2]) : 5;
  std::vector<std::thread> threads;
  for (int number = 0; number < 16; ++number) {
    threads.emplace_back([&, number] {
      for (int turn = 0; turn < turns; ++turn) Call(folder, (number + turn) % calls).check(library);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::cout << "ok\n";
  return 0;
}
