"""A thread beside the model's keeps to one compute thread."""
import queue
import threading

import torch

from sglane.forward.worker_thread import use_one_compute_thread


def test_the_number_of_others_does_not_come_over_it():
    before = torch.get_num_threads()
    asked, found = queue.SimpleQueue(), queue.SimpleQueue()

    def work():
        use_one_compute_thread()
        found.put(None)
        while asked.get():
            (torch.ones(1 << 20) + 1).sum()
            found.put(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found.get()
        for number in (2, 3):
            torch.set_num_threads(number)
            asked.put(True)
            assert found.get() == 1 and torch.get_num_threads() == number
    finally:
        asked.put(False)
        thread.join()
        torch.set_num_threads(before)
