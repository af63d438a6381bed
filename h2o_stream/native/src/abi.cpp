// The SHA-256 of the abi.py that declares this library's interface.
extern "C" const char* h2o_abi() { return H2O_ABI; }
